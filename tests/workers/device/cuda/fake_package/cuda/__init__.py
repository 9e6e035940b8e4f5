"""What ``import cuda`` finds where this folder stands first on the path."""
