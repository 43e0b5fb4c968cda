"""Raw records: where they come from (files, the hub), how files store them, and their chat messages."""
