"""What is said of a diagnosis, a recorded run, a measurement: sentences, and documents of plain
blocks. Verdicts are as stored, or computed from the evidence; nothing is run."""
