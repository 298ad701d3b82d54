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
CREATE TABLE shared (
    run   TEXT PRIMARY KEY REFERENCES run (id) ON DELETE CASCADE,
    since REAL NOT NULL
) WITHOUT ROWID;
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
    ended_at       REAL,
    PRIMARY KEY (run, step)
) WITHOUT ROWID;
CREATE INDEX step_bad ON step (run, step)
    WHERE (skipped OR loss IN ('nan', 9e999, -9e999) OR grad_norm IN ('nan', 9e999, -9e999));
CREATE TABLE step_block (
    run           TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    level         INTEGER NOT NULL,
    block         INTEGER NOT NULL,
    first_step    INTEGER NOT NULL,
    last_step     INTEGER NOT NULL,
    steps         INTEGER NOT NULL,
    skipped       INTEGER NOT NULL,
    bad_losses    INTEGER NOT NULL,
    bad_norms     INTEGER NOT NULL,
    bad           INTEGER NOT NULL,
    bad_ends      INTEGER NOT NULL,
    scale_changes INTEGER NOT NULL,
    low_step      INTEGER,
    low_loss      REAL,
    high_step     INTEGER,
    high_loss     REAL,
    first_bad     INTEGER,
    last_bad      INTEGER,
    last_scale    REAL,
    overhead_s    REAL NOT NULL,
    step_time_s   REAL NOT NULL,
    PRIMARY KEY (run, level, block)
) WITHOUT ROWID;
CREATE TABLE step_mark (
    run  TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    kind TEXT NOT NULL,
    step INTEGER NOT NULL,
    PRIMARY KEY (run, kind, step)
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
    last_step INTEGER,
    PRIMARY KEY (run, role, step)
);
CREATE INDEX frame_span ON frame (run, role, step, last_step);
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
CREATE TABLE event (
    run   TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    seq   INTEGER NOT NULL,
    step  INTEGER NOT NULL,
    kind  TEXT NOT NULL,
    name  TEXT NOT NULL,
    text  TEXT NOT NULL,
    path  TEXT NOT NULL,
    value REAL,
    PRIMARY KEY (run, seq)
) WITHOUT ROWID;
CREATE TABLE result (
    run  TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    seq  INTEGER NOT NULL,
    kind TEXT NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (run, seq)
) WITHOUT ROWID;
CREATE TABLE telemetry (
    run               TEXT NOT NULL REFERENCES run (id) ON DELETE CASCADE,
    device            TEXT NOT NULL,
    at                REAL NOT NULL,
    busy_percent      REAL,
    own_percent       REAL,
    memory_used_bytes INTEGER,
    own_memory_bytes  INTEGER,
    power_w           REAL,
    energy_j          REAL,
    temperature_c     REAL,
    clock_mhz         REAL,
    memory_clock_mhz  REAL,
    pcie_rx_bytes_s   REAL,
    pcie_tx_bytes_s   REAL,
    clock_reasons     TEXT NOT NULL,
    other_processes   INTEGER,
    PRIMARY KEY (run, device, at)
) WITHOUT ROWID;
