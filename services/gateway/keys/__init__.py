"""API keys: the file that has them, the lookup of the key that a request brings, and the reload of the file.

KeysFileError     the file cannot be used, or not be changed
"""
