"""The page Gradients: what it reads (`frames`), says (`words`) and draws (`page`)."""
