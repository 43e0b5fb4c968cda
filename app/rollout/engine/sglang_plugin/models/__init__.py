"""SGLang's models of our presets. A server looks here before it imports all others: `engine/entry.py`."""
