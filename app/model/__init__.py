"""Models: Hugging Face directories, loaded into FSDP2 shards.

A choice of `model=` is a preset of sizes in `conf/model/`. No model has code of its own: `load.py` loads all of them.
"""
