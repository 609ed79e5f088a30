"""Holds what runs in the training process; `node/shimdir.py` copies it, flat, to a private directory, under the names
that the files have here. Nothing here imports hpcstage. `python` is the attachment and the Python layer, `native` the
C extension, `torch` what follows PyTorch's loaders.
"""
