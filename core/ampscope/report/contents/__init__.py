"""What a report says: of a diagnosis, of one recorded run, of a measurement. Verdicts are computed
anew from the stored evidence; nothing is run."""
