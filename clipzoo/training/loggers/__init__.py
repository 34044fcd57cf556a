"""Loggers of a training."""

from clipzoo.training.loggers.base import MetricLogger
from clipzoo.training.loggers.run_logger import Logger

__all__ = ["Logger", "MetricLogger"]
