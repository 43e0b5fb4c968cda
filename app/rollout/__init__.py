"""Rollout: SGLang engines, the pool that balances groups over them, and the rollouter that scores their completions.

Rollouter → EnginePool → RemoteEngine (driver) ⇒ EngineHost (Ray actor) → Client ⇒ SGLang server
"""
