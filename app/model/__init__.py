"""Models: directories of the Hugging Face form, loaded into FSDP2 shards."""
