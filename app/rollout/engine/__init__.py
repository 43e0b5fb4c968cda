"""SGLang engines: EnginePool → RemoteEngine (driver) ⇒ EngineHost (Ray actor) → Client ⇒ SGLang server."""
