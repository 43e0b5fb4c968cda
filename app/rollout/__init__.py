"""Rollout: SGLang engines and the pool that shares work among them."""
