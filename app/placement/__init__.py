"""Introduces the parts to each other and tells the two stories: colocate and fully_async."""
