"""Text -> token windows. stories.py generates the text that the embedded model was trained on."""
from tinykv.data.windows import Windows, calibration_text, load_windows

__all__ = ["Windows", "calibration_text", "load_windows"]
