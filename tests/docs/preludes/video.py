from pathlib import Path

from clips import draw_clips

draw_clips(Path("videos"), 12)
