"""Text -> token windows. stories.py generates the text that the embedded model was trained on."""
from tinykv.lab.data.windows import Windows, load_windows, share_text

__all__ = ["Windows", "load_windows", "share_text"]
