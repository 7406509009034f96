"""Who runs in each step: continuous batching over the allocator, without a model.

`scheduler.py` has the rules and what they promise; `sequence.py` what is scheduled and the queue of those that wait,
`rows.py` the state per row of the batch, `step.py` what is said about a step.
"""

from kvpager.scheduler.rows import RowFollower
from kvpager.scheduler.scheduler import Scheduler
from kvpager.scheduler.sequence import Sequence, Status
from kvpager.scheduler.step import SampleRows, ScheduledStep, SchedulerCounts

__all__ = ["RowFollower", "SampleRows", "ScheduledStep", "Scheduler", "SchedulerCounts", "Sequence", "Status"]
