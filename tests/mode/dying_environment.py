"""A module whose import ends the process."""

import os
import sys

sys.stderr.write("no license was found\n")
sys.stderr.flush()
os._exit(4)
