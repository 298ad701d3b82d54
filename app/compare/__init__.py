"""The pages Compare and Batch size."""
