"""The errors a user can meet, and the exit code each one means.

FlatpeakError
├── InputError            exit 2: the user can mend it (a file, a key, a degree)
│   ├── SpecError
│   ├── DataError
│   └── CheckpointError
│       └── UnknownFormat
├── DoesNotFit            exit 3: the plan exceeds a budget
└── RunFailed             exit 4: the cluster or a process of the run failed
    ├── ClusterError
    │   └── ConnectionLost
    ├── ProcessLost
    ├── SnapshotFailed
    ├── StateLost
    │   └── UpdateLost
    └── WaitTimeout

Every message says what happened with its numbers, and which setting mends it. The constructors take
the finished message alone, so that an error survives pickling between processes.
"""


class FlatpeakError(Exception):
    exit_code = 4


class InputError(FlatpeakError, ValueError):
    exit_code = 2


class SpecError(InputError):
    pass


class DataError(InputError):
    pass


class CheckpointError(InputError):
    pass


class UnknownFormat(CheckpointError):
    """Whole, but of another version: not to be passed over like what is damaged."""


class DoesNotFit(FlatpeakError):
    exit_code = 3


class RunFailed(FlatpeakError):
    exit_code = 4


class ClusterError(RunFailed):
    pass


class ConnectionLost(ClusterError):
    """A peer hung up: most likely it died, which is then what the user wants to hear of."""


class SnapshotFailed(RunFailed):
    """It could not be written; nothing of it is left, and the state itself is well."""


class ProcessLost(RunFailed):
    """One died while the run started: nothing had been done yet, and it can start again."""


class StateLost(RunFailed):
    """A node is gone, and arenas in its memory with it."""


class UpdateLost(StateLost):
    """The arenas are there, but not with what the update that they are in could be finished."""


class WaitTimeout(RunFailed, TimeoutError):
    pass
