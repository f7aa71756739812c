"""A real browser, where the machine has one."""

import shutil
import subprocess

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-sync --no-first-run "
    "--use-gl=angle --use-angle=swiftshader --enable-unsafe-swiftshader --virtual-time-budget=20000"
)


def dom(page, profile):
    """The document after its scripts have run, as text."""
    command = [BROWSER, *FLAGS.split(), f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=180).stdout
