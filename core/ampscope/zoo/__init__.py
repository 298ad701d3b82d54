"""The fault zoo: real failures rebuilt as small training scripts, each with a healthy twin.

``scripts`` holds them as their users would have written them; ``answers`` holds what is wrong with
each. The rules never see either: the zoo measures them.
"""
