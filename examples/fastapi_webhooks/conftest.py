import os
import tempfile

# Before the program is imported: its tests leave webhooks.db alone, and may be given another database.
FOLDER = tempfile.TemporaryDirectory()
os.environ.setdefault("DATABASE_URL", f"sqlite+aiosqlite:///{FOLDER.name}/webhooks.db")
