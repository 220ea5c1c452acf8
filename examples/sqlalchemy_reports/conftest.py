import os
import tempfile

# Before the program is imported: its tests leave reports.db alone, and may be given another database.
FOLDER = tempfile.TemporaryDirectory()
os.environ.setdefault("DATABASE_URL", f"sqlite:///{FOLDER.name}/reports.db")
