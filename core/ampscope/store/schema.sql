-- ampscope store, schema version 7. This text is the documentation of the store.
-- One SQLite file, WAL mode. Evidence is stored, and what a diagnosis concluded from it.
--
-- Numbers that may be non-finite (loss, scale, norms) are REAL where finite and infinite, and the
-- text 'nan' for NaN, because SQLite turns a REAL NaN into NULL. NULL means "not recorded".
--
-- A file of another version is refused in one sentence.

-- One recorded training. `state` is queued, running, finished, failed or cancelled; a reader shows
-- an active run whose process is gone or whose heartbeat is old as lost. An imported run alone may
-- be stored as lost: it has no process. Runs merged without --trust are imported ones, too.
CREATE TABLE run (
    id          TEXT PRIMARY KEY,      -- 12 hexadecimal digits, the first 9 of them a time stamp
    spec        TEXT NOT NULL,         -- records.RunSpec as JSON
    state       TEXT NOT NULL,
    created     REAL NOT NULL,         -- seconds since 1970-01-01 UTC, as all times here
    started     REAL,
    ended       REAL,
    heartbeat   REAL,                  -- last sign of life of the process that writes
    pid         INTEGER,
    pid_started REAL,                  -- start time of that process: a pid alone can be reused
    machine     TEXT,                  -- records.Machine as JSON
    message     TEXT NOT NULL DEFAULT '',  -- one sentence on how it ended
    traceback   TEXT NOT NULL DEFAULT '',  -- the child's own
    steps_done  INTEGER NOT NULL DEFAULT 0, -- of a measurement: its results
    cancel      INTEGER NOT NULL DEFAULT 0 -- set to ask the run to stop
);
CREATE INDEX run_created ON run (created);

-- Runs that the teacher of a class shows to the students (docs/classroom.md); without a row a run is
-- the teacher's own. It says nothing about the run itself, so it is neither exported nor merged.
CREATE TABLE shared (
    run   TEXT PRIMARY KEY REFERENCES run (id) ON DELETE CASCADE,
    since REAL NOT NULL
) WITHOUT ROWID;

-- One optimizer step of a run (records.StepRecord).
CREATE TABLE step (
    run            TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    step           INTEGER NOT NULL,
    loss           REAL,
    scale          REAL,               -- loss scale used in this step
    growth_counter INTEGER,            -- finite steps since the last growth, after this step
    skipped        INTEGER NOT NULL,   -- 1 when GradScaler left the optimizer step out
    grad_norm      REAL,               -- 2-norm of the unscaled gradients that the optimizer was given
    lr             REAL,
    step_time_s    REAL,               -- without the instruments
    overhead_s     REAL,               -- the instruments
    peak_bytes     INTEGER,
    moved_share    REAL,               -- share of the weights that this step changed
    op_set         INTEGER,            -- op_set.id; NULL when the step was not traced
    ended_at       REAL,               -- NULL where the clock was not read
    unclipped_norm REAL,               -- grad_norm before the script's own clip; NULL where there was none
    PRIMARY KEY (run, step)
) WITHOUT ROWID;
-- Bad steps: skipped, or the loss or the norm of the gradients is not finite (9e999 is Inf).
CREATE INDEX step_bad ON step (run, step)
    WHERE (skipped OR loss IN ('nan', 9e999, -9e999) OR grad_norm IN ('nan', 9e999, -9e999));

-- Sums over blocks of 16 * 4^level step numbers (store/pyramid.py): an overview of a long run reads
-- these instead of its steps. They follow from `step` and are written with it.
CREATE TABLE step_block (
    run           TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    level         INTEGER NOT NULL,
    block         INTEGER NOT NULL,    -- step number div the level's size
    first_step    INTEGER NOT NULL,    -- recorded ones
    last_step     INTEGER NOT NULL,
    steps         INTEGER NOT NULL,
    skipped       INTEGER NOT NULL,
    bad_losses    INTEGER NOT NULL,    -- not finite
    bad_norms     INTEGER NOT NULL,
    bad           INTEGER NOT NULL,    -- steps that are bad in any of these three ways
    bad_ends      INTEGER NOT NULL,    -- step_mark of kind bad
    scale_changes INTEGER NOT NULL,    -- step_mark of kind scale
    low_step      INTEGER,             -- of the smallest finite loss
    low_loss      REAL,
    high_step     INTEGER,
    high_loss     REAL,
    first_bad     INTEGER,
    last_bad      INTEGER,
    last_scale    REAL,
    overhead_s    REAL NOT NULL,       -- sums, without step 0
    step_time_s   REAL NOT NULL,
    PRIMARY KEY (run, level, block)
) WITHOUT ROWID;

-- Steps at which something changes. kind scale: another scale than the step before. kind bad: first
-- or last of an episode of consecutive bad steps within a block of level 0.
CREATE TABLE step_mark (
    run  TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    kind TEXT NOT NULL,
    step INTEGER NOT NULL,
    PRIMARY KEY (run, kind, step)
) WITHOUT ROWID;

-- The modules of a run's model; `module` is its number within the run (records.ModuleRecord).
CREATE TABLE module (
    run             TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    module          INTEGER NOT NULL,
    path            TEXT NOT NULL,     -- dotted, '' for the root
    type            TEXT NOT NULL,
    weight_dtypes   TEXT NOT NULL,
    parameter_count INTEGER NOT NULL,  -- own parameters only
    is_leaf         INTEGER NOT NULL,
    shared_with     TEXT NOT NULL,     -- path of the module whose parameters these are
    PRIMARY KEY (run, module)
) WITHOUT ROWID;

-- Ops of a step by module, phase and dtypes (records.OpRecord). Steps that ran the same ops share
-- one set, so tracing every step costs the store next to nothing.
CREATE TABLE op (
    run     TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    op_set  INTEGER NOT NULL,
    module  INTEGER NOT NULL,
    phase   TEXT NOT NULL,             -- forward, backward, step
    op      TEXT NOT NULL,             -- aten name
    inputs  TEXT NOT NULL,             -- dtypes of tensor inputs
    outputs TEXT NOT NULL,
    count   INTEGER NOT NULL,
    flops   INTEGER NOT NULL,          -- of all `count` calls, torch.utils.flop_counter's formulas
    is_cast INTEGER NOT NULL,
    PRIMARY KEY (run, op_set, module, phase, op, inputs, outputs)
) WITHOUT ROWID;

-- Exponent histograms of all modules for one role at one step, packed (store/frames.py).
CREATE TABLE frame (
    run   TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    role  TEXT NOT NULL,               -- activation, grad_output, weight, weight_grad, update
    step  INTEGER NOT NULL,
    scale REAL NOT NULL,               -- loss scale that multiplies these values, 1 when none does
    blob  BLOB NOT NULL,
    last_step INTEGER,                 -- of a frame that adds up several recorded steps of a watched
                                       -- run (docs/decisions/0007); NULL: of `step` alone
    PRIMARY KEY (run, role, step)
);
-- Which steps there are frames of, without their blobs.
CREATE INDEX frame_span ON frame (run, role, step, last_step);

-- Half precision against the fp32 shadow (records.ShadowRecord).
CREATE TABLE shadow (
    run            TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    step           INTEGER NOT NULL,
    module         INTEGER NOT NULL,
    role           TEXT NOT NULL,
    total          INTEGER NOT NULL,
    lost           INTEGER NOT NULL,   -- zero in half, not zero in fp32
    subnormal      INTEGER NOT NULL,   -- subnormal in half and not zero; of bf16 only where fp32's value is normal
    zero_before    INTEGER NOT NULL,   -- zero in both
    relative_error REAL,
    cosine         REAL,
    max_abs_fp32   REAL,               -- largest magnitude in the shadow, unscaled
    below_range    INTEGER,            -- of `lost`: smaller in fp32 than the format's smallest number
    PRIMARY KEY (run, step, role, module)
) WITHOUT ROWID;

-- Parameters whose gradient held NaN or Inf (records.NonFiniteRecord).
CREATE TABLE nonfinite (
    run       TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    step      INTEGER NOT NULL,
    "order"   INTEGER NOT NULL,        -- 0 is the first that backward reached
    parameter TEXT NOT NULL,
    total     INTEGER NOT NULL,
    nan       INTEGER NOT NULL,
    pos_inf   INTEGER NOT NULL,
    neg_inf   INTEGER NOT NULL,
    PRIMARY KEY (run, step, "order")
) WITHOUT ROWID;

-- What was seen of an untouched script (observations.py), in order; `data` is the record as JSON.
CREATE TABLE observation (
    run  TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    seq  INTEGER NOT NULL,
    kind TEXT NOT NULL,                -- name of the record: Call, Attempt, Scan, BadOp, …
    data TEXT NOT NULL,
    PRIMARY KEY (run, seq)
) WITHOUT ROWID;

-- What a diagnosis concluded when it ended (ampscope.diagnosis.load), under its baseline run. Where
-- there is none, or a run was added since, the evidence is judged anew.
CREATE TABLE conclusion (
    run  TEXT PRIMARY KEY REFERENCES run (id) ON DELETE CASCADE,
    data TEXT NOT NULL
) WITHOUT ROWID;

-- What a watched run reported (records.Event), in order.
CREATE TABLE event (
    run   TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    seq   INTEGER NOT NULL,
    step  INTEGER NOT NULL,
    kind  TEXT NOT NULL,               -- alarm, capsule, schedule, nonfinite, calibration, …
    name  TEXT NOT NULL,               -- which alarm; where the first non-finite value was seen …
    text  TEXT NOT NULL,               -- one sentence for a person
    path  TEXT NOT NULL,               -- file of a capsule
    value REAL,
    PRIMARY KEY (run, seq)
) WITHOUT ROWID;

-- What a measurement found (records.results), in order; `data` is the record as JSON, NaN and
-- infinities in Python's spelling.
CREATE TABLE result (
    run  TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    seq  INTEGER NOT NULL,
    kind TEXT NOT NULL,                -- name of the record: Rate, Product, …
    data TEXT NOT NULL,
    PRIMARY KEY (run, seq)
) WITHOUT ROWID;

-- What a device read beside a run, about 10 times per second (records.Sample). NULL: not readable.
CREATE TABLE telemetry (
    run               TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    device            TEXT NOT NULL,   -- cpu, cuda:0
    at                REAL NOT NULL,
    busy_percent      REAL,            -- a kernel ran; on a CPU of all its cores
    own_percent       REAL,            -- CPU: of that, the run's own processes
    memory_used_bytes INTEGER,         -- by all processes
    own_memory_bytes  INTEGER,         -- by the run's own process
    power_w           REAL,
    energy_j          REAL,            -- a counter; differences mean something
    temperature_c     REAL,
    clock_mhz         REAL,
    memory_clock_mhz  REAL,
    pcie_rx_bytes_s   REAL,            -- into the device
    pcie_tx_bytes_s   REAL,
    clock_reasons     TEXT NOT NULL,   -- what holds the clocks down, comma between them
    other_processes   INTEGER,         -- with memory on the device, beside the run's own
    PRIMARY KEY (run, device, at)
) WITHOUT ROWID;
