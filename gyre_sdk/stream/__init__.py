"""From the logs to whoever wants the records while executions run: sinks, and the sender to a training
backend.
"""

from gyre_sdk.stream.sender import FrameSender, SenderStatus
from gyre_sdk.stream.sinks import NullSink, RecordSink, TeeSink

__all__ = ["FrameSender", "NullSink", "RecordSink", "SenderStatus", "TeeSink"]
