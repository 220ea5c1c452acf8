------------------------------ MODULE Journal ------------------------------
(***************************************************************************)
(* The journal of one queue: who holds the claim lock changes the board,   *)
(* and appends one delta for it.  Claimers keep the board in memory, and   *)
(* follow one another's deltas.  The database may lose every transaction   *)
(* that was not flushed, and then uses their numbers again.                *)
(*                                                                         *)
(* Each job has a lane of its own, and all jobs share one gate.            *)
(***************************************************************************)
EXTENDS Naturals, FiniteSets, TLC

CONSTANTS
    Claimers,  \* processes that claim from the queue
    Jobs,
    None,      \* no board in memory, nobody at the lock, no job picked
    MaxSeq,    \* the bound of the search: how far the journal's numbers go
    Arrivals,  \* TRUE if jobs go on arriving
    Policies,  \* TRUE if an operator may raise the limit from 1 to 2
    Broken     \* "nothing", or which safeguard is left out; each twin has one

VARIABLES
    db,    \* what the database holds now
    disk,  \* what it would hold after a crash
    mem,   \* the resident board of each claimer, or None
    lock   \* who holds the claim lock and what was planned, or None

vars == <<db, disk, mem, lock>>

Min(S) == CHOOSE n \in S : \A m \in S : n <= m
Max(S) == CHOOSE n \in S : \A m \in S : n >= m

Rows == Jobs \cup {"gate"}  \* a lane is named by its job

(***************************************************************************)
(* Boards.  A row is replaced as a whole, so applying a delta twice does   *)
(* what applying it once does.                                             *)
(***************************************************************************)

\* The board overlaid by the deltas after number `seq`: of each row, the newest one.
Replay(board, d, seq) ==
    [r \in Rows |->
        LET having == {s \in DOMAIN d.journal : s > seq /\ r \in DOMAIN d.journal[s].rows}
        IN  IF having = {} THEN board[r] ELSE d.journal[Max(having)].rows[r]]

RowsAfter(d, seq) == UNION {DOMAIN d.journal[s].rows : s \in {s \in DOMAIN d.journal : s > seq}}

\* What a reader sees, and what a claimer loads that has no use for its memory.
View(d) == Replay(d.tables, d, d.stored)

\* The truth: the board as it follows from the jobs and the events that are not folded yet.
Rebuild(d) ==
    [r \in Rows |->
        IF r = "gate"
        THEN [running |-> Cardinality({j \in Jobs : d.job[j] = "running" \/ d.event[j] = "ended"}),
              limit |-> d.limit]
        ELSE d.job[r] = "ready" /\ d.event[r] = "none"]

(***************************************************************************)
(* Taking the claim lock: which memory may be used, and as what.           *)
(***************************************************************************)

Known(d, seq, token) ==
    \/ seq = d.seq /\ (token = d.token \/ Broken = "no token")
    \/ seq \in DOMAIN d.journal /\ (d.journal[seq].token = token \/ Broken = "no token")

\* The dirty list reaches back far enough: no checkpoint was lost that had emptied it.
Reaches(m, d) == m.since <= d.stored \/ Broken = "lost checkpoint"

Usable(c) == mem[c] # None /\ Known(db, mem[c].seq, mem[c].token) /\ Reaches(mem[c], db)

Reloaded == [seq |-> db.seq, token |-> db.token, board |-> View(db), dirty |-> RowsAfter(db, db.stored), since |-> db.stored]

Current(c) ==
    IF ~Usable(c) THEN Reloaded
    ELSE LET m == mem[c] IN
         [seq   |-> db.seq,
          token |-> db.token,
          board |-> Replay(m.board, db, m.seq),
          dirty |-> IF Broken = "own rows" THEN m.dirty ELSE m.dirty \cup RowsAfter(db, m.seq),
          since |-> m.since]

\* A random token is one that nobody has beside the same number: which one does not matter.
TokensOf(d, seq) ==
    (IF d.seq = seq THEN {d.token} ELSE {}) \cup (IF seq \in DOMAIN d.journal THEN {d.journal[seq].token} ELSE {})
FreshToken(seq) ==
    LET inUse == TokensOf(db, seq) \cup TokensOf(disk, seq)
                    \cup {mem[c].token : c \in {c \in Claimers : mem[c] # None /\ mem[c].seq = seq}}
    IN  Min((0..Cardinality(inUse)) \ inUse)

(***************************************************************************)
(* Producers and workers append events.  They are durable when they        *)
(* return, which makes durable whatever was committed before them.         *)
(***************************************************************************)

Durably(d) == db' = d /\ disk' = d

Settle(j) ==
    /\ db.job[j] = "running"
    /\ Durably([db EXCEPT !.job[j] = "done", !.event[j] = "ended"])
    /\ UNCHANGED <<mem, lock>>

\* The next job of a lane.
Enqueue(j) ==
    /\ Arrivals
    /\ db.job[j] = "done" /\ db.event[j] = "none"
    /\ Durably([db EXCEPT !.job[j] = "ready", !.event[j] = "arrived"])
    /\ UNCHANGED <<mem, lock>>

(***************************************************************************)
(* A claim: catch up, fold, plan; then one transaction, perhaps unflushed. *)
(***************************************************************************)

With(events, kind) == {j \in Jobs : events[j] = kind}

Fold(board, events) ==
    [r \in Rows |->
        IF r = "gate" THEN [board[r] EXCEPT !.running = @ - Cardinality(With(events, "ended"))]
        ELSE board[r] \/ r \in With(events, "arrived")]

Touched(events, pick) ==
    With(events, "arrived")
        \cup (IF pick = None THEN {} ELSE {pick, "gate"})
        \cup (IF With(events, "ended") = {} THEN {} ELSE {"gate"})

Picks(board) ==
    LET ready == {j \in Jobs : board[j]}
    IN  IF ready = {} \/ board["gate"].running >= board["gate"].limit THEN {None} ELSE ready

Start(board, pick) ==
    IF pick = None THEN board ELSE [board EXCEPT ![pick] = FALSE, !["gate"].running = @ + 1]

\* The board in memory is changed here, before anything is committed.
Plan(c) ==
    /\ lock = None
    /\ db.seq < MaxSeq
    /\ LET m == Current(c)
           folded == Fold(m.board, db.event)
       IN  \E pick \in Picks(folded) :
            /\ Touched(db.event, pick) # {}
            /\ mem' = [mem EXCEPT ![c] = [m EXCEPT !.board = Start(folded, pick)]]
            /\ lock' = [who |-> c, events |-> db.event, pick |-> pick]
    /\ UNCHANGED <<db, disk>>

Commit(c) ==
    /\ lock # None /\ lock.who = c
    /\ LET rows == Touched(lock.events, lock.pick)
           seq == db.seq + 1
           token == FreshToken(seq)
           delta == [token |-> token, rows |-> [r \in rows |-> mem[c].board[r]]]
       IN  /\ db' = [db EXCEPT
                !.job = [j \in Jobs |-> IF j = lock.pick THEN "running" ELSE @[j]],
                !.event = [j \in Jobs |-> IF lock.events[j] = "none" THEN @[j] ELSE "none"],
                !.seq = seq,
                !.token = token,
                !.journal = [s \in DOMAIN @ \cup {seq} |-> IF s = seq THEN delta ELSE @[s]]]
           /\ mem' = [mem EXCEPT ![c].seq = seq, ![c].token = token, ![c].dirty = @ \cup rows]
    /\ lock' = None
    /\ UNCHANGED disk

(***************************************************************************)
(* A checkpoint.  The model does not rely on its being one transaction:    *)
(* interrupted, it may leave its lanes or its gate in the tables, or both. *)
(***************************************************************************)

Stored(m, rows) == [r \in Rows |-> IF r \in rows THEN m.board[r] ELSE db.tables[r]]

Checkpoint(c) ==
    /\ lock = None
    /\ db.seq > db.base
    /\ LET m == Current(c) IN
       /\ db' = [db EXCEPT
                !.tables = Stored(m, m.dirty),
                !.base = db.stored,
                !.stored = db.seq,
                !.journal = [s \in {s \in DOMAIN @ : s > db.stored} |-> @[s]]]
       /\ mem' = [mem EXCEPT ![c] = [m EXCEPT !.dirty = {}, !.since = db.seq]]
    /\ UNCHANGED <<disk, lock>>

\* With no row at all, this is a claim that finds nothing to do: it leaves the newest board in memory.
InterruptedCheckpoint(c) ==
    /\ lock = None
    /\ LET m == Current(c) IN
       /\ \E rows \in {{}, m.dirty \cap Jobs, m.dirty \cap {"gate"}, m.dirty} : db' = [db EXCEPT !.tables = Stored(m, rows)]
       /\ mem' = [mem EXCEPT ![c] = m]
    /\ UNCHANGED <<disk, lock>>

(***************************************************************************)
(* An operator raises the limit: one durable transaction on the tables,    *)
(* after which nobody can catch up.                                        *)
(***************************************************************************)

ChangePolicy ==
    /\ Policies
    /\ lock = None
    /\ db.limit = 1
    /\ db.seq < MaxSeq
    /\ LET seq == db.seq + 1
       IN  Durably([db EXCEPT
                !.limit = 2,
                !.tables = [View(db) EXCEPT !["gate"].limit = 2],
                !.journal = << >>,
                !.seq = seq, !.token = FreshToken(seq), !.stored = seq, !.base = seq])
    /\ UNCHANGED <<mem, lock>>

(***************************************************************************)
(* What goes wrong.                                                        *)
(***************************************************************************)

\* Any transaction may be the last that a crash spares.
Flush ==
    /\ disk # db
    /\ disk' = db
    /\ UNCHANGED <<db, mem, lock>>

Released(c) == IF lock # None /\ lock.who = c THEN None ELSE lock

\* The claimer dies, evicts its board, or does not learn what became of its transaction.
Forget(c) ==
    /\ mem[c] # None
    /\ mem' = [mem EXCEPT ![c] = IF Broken = "kept board" /\ lock # None /\ lock.who = c THEN @ ELSE None]
    /\ lock' = Released(c)
    /\ UNCHANGED <<db, disk>>

\* The transaction that was open fails, so that its claimer drops its board. The others keep theirs.
CrashDatabase ==
    /\ disk # db
    /\ db' = disk
    /\ mem' = [c \in Claimers |-> IF lock # None /\ lock.who = c THEN None ELSE mem[c]]
    /\ lock' = None
    /\ UNCHANGED disk

(***************************************************************************)
(* The whole.                                                              *)
(***************************************************************************)

Init ==
    /\ db = [job |-> [j \in Jobs |-> "ready"],
             event |-> [j \in Jobs |-> "none"],
             limit |-> 1,
             tables |-> [r \in Rows |-> IF r = "gate" THEN [running |-> 0, limit |-> 1] ELSE TRUE],
             journal |-> << >>,
             seq |-> 0, token |-> 0, stored |-> 0, base |-> 0]
    /\ disk = db
    /\ mem = [c \in Claimers |-> None]
    /\ lock = None

Next ==
    \/ \E j \in Jobs : Settle(j) \/ Enqueue(j)
    \/ \E c \in Claimers :
        Plan(c) \/ Commit(c) \/ Checkpoint(c) \/ InterruptedCheckpoint(c) \/ Forget(c)
    \/ ChangePolicy
    \/ Flush
    \/ CrashDatabase

Spec == Init /\ [][Next]_vars

Fairness ==
    /\ \A j \in Jobs : SF_vars(Settle(j))
    /\ SF_vars(\E c \in Claimers : Plan(c))
    /\ SF_vars(\E c \in Claimers : Commit(c))

FairSpec == Spec /\ Fairness

(***************************************************************************)
(* What holds.                                                             *)
(***************************************************************************)

\* J01: whatever a claimer would plan from is the truth.
J01 == lock = None => \A c \in Claimers : Current(c).board = Rebuild(db)

\* J02: a state that the database has lost is not planned from.
J02 ==
    /\ \A c \in Claimers : lock = None /\ Usable(c) =>
        \/ mem[c].seq = db.seq /\ mem[c].token = db.token
        \/ mem[c].seq \in DOMAIN db.journal /\ mem[c].token = db.journal[mem[c].seq].token
    /\ lock # None => mem[lock.who].seq = db.seq /\ mem[lock.who].token = db.token

\* J04: a reader sees the truth at every moment, also in the middle of a checkpoint and after one that was interrupted.
J04 == View(db) = Rebuild(db)

Planned == lock # None /\ lock.pick # None

\* No job is claimed that is claimed already, or has ended.
ClaimedOnce == Planned => db.job[lock.pick] = "ready"

\* No claim exceeds the limit.
WithinLimit == Planned => Cardinality({j \in Jobs : db.job[j] = "running"}) < db.limit

\* A dirty list holds every row that the tables may not have.
DirtyRows == lock = None => \A c \in Claimers : RowsAfter(db, db.stored) \subseteq Current(c).dirty

\* Every job ends, however often claimers and the database crash.
EveryJobEnds == \A j \in Jobs : <>(db.job[j] = "done")

\* For TLC: claimers are alike, and so are jobs.
Symmetry == Permutations(Claimers) \cup Permutations(Jobs)
=============================================================================
