"""Checks that the subjects of commits have at most 72 characters: `.ci/subjects.py BASE`.

The commits are those of HEAD that BASE does not have, without merges. If the clone does not contain
BASE, as a shallow clone, nothing is checked.
"""

import subprocess
import sys

MOST = 72  # characters; longer subjects are cut in lists of commits


def git(*arguments):
    return subprocess.run(["git", *arguments], capture_output=True, text=True)


def main(base):
    if git("merge-base", base, "HEAD").returncode:
        print(f"this clone has no common commit of {base} and HEAD: subjects were not checked")
        return 0
    log = git("log", "--no-merges", "--format=%h %s", f"{base}..HEAD")
    commits = [line.partition(" ") for line in log.stdout.splitlines()]
    long = [(commit, subject) for commit, _, subject in commits if len(subject) > MOST]
    for commit, subject in long:
        print(f"{commit}: shorten the subject from {len(subject)} to {MOST} characters: {subject}")
    return len(long) > 0 or log.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
