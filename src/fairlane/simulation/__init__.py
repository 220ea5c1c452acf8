"""What a policy would do: the plan of real claims on a virtual clock, over a declared workload or a queue's history."""

from fairlane.simulation.measures import Simulation
from fairlane.simulation.replay import simulate
from fairlane.simulation.workload import JobClass, RunTimes, Workload

__all__ = ["JobClass", "RunTimes", "Simulation", "Workload", "simulate"]
