"""Models: Hugging Face directories, loaded into FSDP2 shards."""
