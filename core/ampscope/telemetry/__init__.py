"""What the machine does while a run takes place: a process of its own, ten readings per second.

    python -m ampscope.telemetry.sampler --store FILE --run ID --pid PID

It costs under 1 % of a core (benchmarks/results/sampler_cost.json), so it imports neither torch nor
NumPy nor the records: a reading is a :class:`~ampscope.telemetry.values.SampleValues` until it is a
row of the store. Readers never fail; what a machine does not report is left out of the reading.
"""
