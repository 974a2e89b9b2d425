"""Every error that Penstock raises on purpose.

    PenstockError
    ├── FormatError      a file or a text is not what it should be
    ├── GraphError       a layer graph contradicts itself
    ├── ClusterError     a cluster cannot exist as described
    ├── ProfileError     costs that cannot be costs
    ├── PlanError        a plan that cannot run, or none that fits
    ├── ScheduleError    actions out of order, or a deadlock
    ├── JobError         the user's job file or its data
    ├── CaptureError     a model that no front end could capture
    └── WorkerError      a worker, or the peer it waited for, failed

The command line shows one of these as a single line and exits with code 2; anything else is a bug
and keeps its traceback.
"""


class PenstockError(Exception):
    """Base of all errors that say what is wrong, where, and what to do about it."""


class FormatError(PenstockError):
    pass


class GraphError(PenstockError):
    pass


class ClusterError(PenstockError):
    pass


class ProfileError(PenstockError):
    pass


class PlanError(PenstockError):
    pass


class ScheduleError(PenstockError):
    pass


class JobError(PenstockError):
    pass


class CaptureError(PenstockError):
    pass


class WorkerError(PenstockError):
    pass
