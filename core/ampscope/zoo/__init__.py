"""The fault zoo: real failures rebuilt as small training scripts, each with a healthy twin.

``scripts`` holds them as their users would have written them; ``answers.toml`` holds what is wrong
with each, and ``score`` compares. The rules never see either: the zoo measures them.
"""
