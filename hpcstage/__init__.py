"""hpcstage: one word before a training command makes the disk inside each compute node work for the job."""

__version__ = "0.1.0"
