"""Raw records: where they come from (files, the hub) and how files store them."""
