"""What a diagnosis found and which fixes cured it, made live or read back: nothing is started."""
