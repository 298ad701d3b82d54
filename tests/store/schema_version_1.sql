CREATE TABLE run (
    id          TEXT PRIMARY KEY,
    spec        TEXT NOT NULL,
    state       TEXT NOT NULL,
    created     REAL NOT NULL,
    started     REAL,
    ended       REAL,
    heartbeat   REAL,
    pid         INTEGER,
    pid_started REAL,
    machine     TEXT,
    message     TEXT NOT NULL DEFAULT '',
    traceback   TEXT NOT NULL DEFAULT '',
    steps_done  INTEGER NOT NULL DEFAULT 0,
    cancel      INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX run_created ON run (created);
CREATE TABLE step (
    run            TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    step           INTEGER NOT NULL,
    loss           REAL,
    scale          REAL,
    growth_counter INTEGER,
    skipped        INTEGER NOT NULL,
    grad_norm      REAL,
    lr             REAL,
    step_time_s    REAL,
    overhead_s     REAL,
    peak_bytes     INTEGER,
    moved_share    REAL,
    op_set         INTEGER,
    PRIMARY KEY (run, step)
) WITHOUT ROWID;
CREATE TABLE module (
    run             TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    module          INTEGER NOT NULL,
    path            TEXT NOT NULL,
    type            TEXT NOT NULL,
    weight_dtypes   TEXT NOT NULL,
    parameter_count INTEGER NOT NULL,
    is_leaf         INTEGER NOT NULL,
    shared_with     TEXT NOT NULL,
    PRIMARY KEY (run, module)
) WITHOUT ROWID;
CREATE TABLE op (
    run     TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    op_set  INTEGER NOT NULL,
    module  INTEGER NOT NULL,
    phase   TEXT NOT NULL,
    op      TEXT NOT NULL,
    inputs  TEXT NOT NULL,
    outputs TEXT NOT NULL,
    count   INTEGER NOT NULL,
    flops   INTEGER NOT NULL,
    is_cast INTEGER NOT NULL,
    PRIMARY KEY (run, op_set, module, phase, op, inputs, outputs)
) WITHOUT ROWID;
CREATE TABLE frame (
    run   TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    role  TEXT NOT NULL,
    step  INTEGER NOT NULL,
    scale REAL NOT NULL,
    blob  BLOB NOT NULL,
    PRIMARY KEY (run, role, step)
);
CREATE TABLE shadow (
    run            TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    step           INTEGER NOT NULL,
    module         INTEGER NOT NULL,
    role           TEXT NOT NULL,
    total          INTEGER NOT NULL,
    lost           INTEGER NOT NULL,
    subnormal      INTEGER NOT NULL,
    zero_before    INTEGER NOT NULL,
    relative_error REAL,
    cosine         REAL,
    max_abs_fp32   REAL,
    PRIMARY KEY (run, step, role, module)
) WITHOUT ROWID;
CREATE TABLE nonfinite (
    run       TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    step      INTEGER NOT NULL,
    "order"   INTEGER NOT NULL,
    parameter TEXT NOT NULL,
    total     INTEGER NOT NULL,
    nan       INTEGER NOT NULL,
    pos_inf   INTEGER NOT NULL,
    neg_inf   INTEGER NOT NULL,
    PRIMARY KEY (run, step, "order")
) WITHOUT ROWID;
CREATE TABLE observation (
    run  TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    seq  INTEGER NOT NULL,
    kind TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (run, seq)
) WITHOUT ROWID;
