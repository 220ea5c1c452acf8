"""An engine that a team already runs does the work that Fairlane admits: Celery, Dramatiq or Taskiq.

A forwarder joins an App and an engine's own app. The dispatcher (`fairlane forward shop:forwarder`) claims jobs under
their policy, publishes a message for each, and holds the claim until the engine's worker adopts it.
"""

from fairlane.forward.delivery import Token
from fairlane.forward.forwarder import Forwarded, Forwarder, Message, Unpublishable

__all__ = ["Forwarded", "Forwarder", "Message", "Token", "Unpublishable"]
