"""The program that is measured. A directory of its own, as a script's directory is where Python looks for modules first."""
