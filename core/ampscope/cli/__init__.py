"""The command ``ampscope``: thin; every command parses, calls one room, and prints."""
