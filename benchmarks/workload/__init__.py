"""The program that is measured, in a directory of its own: Python looks for modules first where the script is."""
