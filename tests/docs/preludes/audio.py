import pathlib
import wave

import numpy as np

for number in range(12):
    folder = pathlib.Path("recordings", ("hum", "whistle")[number % 2])
    folder.mkdir(parents=True, exist_ok=True)
    time = np.arange(8_000 + 2_000 * number) / 16_000
    sound = np.sin(2 * np.pi * (200 + 300 * (number % 2)) * time)
    with wave.open(str(folder / f"{number:02d}.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((8_000 * sound).astype("<i2").tobytes())
