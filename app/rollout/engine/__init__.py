"""SGLang engines: EnginePool → RemoteEngine (driver) ⇒ EngineHost (Ray actor) → Client ⇒ SGLang server.

`server_connection.py` starts a server and waits until it is healthy; `entry.py` is the server's main module.
"""
