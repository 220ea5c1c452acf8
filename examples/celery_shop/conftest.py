import os
import tempfile

# Before the program is imported: its tests leave shop.db alone.
FOLDER = tempfile.TemporaryDirectory()
os.environ["DATABASE_URL"] = f"sqlite:///{FOLDER.name}/shop.db"
