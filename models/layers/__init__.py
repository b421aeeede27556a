"""The kinds of layers, one file each, with the doors that `sublayer.py` describes."""
