"""Eight tasks of our own with the outward form of well-known terminal tasks: what their Dockerfiles, solutions and test scripts use.

`write(folder)` lays them out as a checkout. Network is public, as there; `offline` turns it off where a task can do without.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

TASK = """\
version = "1.0"

[metadata]
author_name = "Gyre"
author_email = "gyre@example.org"
difficulty = "medium"
category = "software-engineering"
tags = ["coding"]
expert_time_estimate_min = 10.0
junior_time_estimate_min = 20.0

[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 300.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory = "2G"
storage = "2G"
"""
HEAD = """\
#!/bin/bash

# Tools first.
apt-get update
apt-get install -y curl

curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh

source $HOME/.local/bin/env

# A working directory must be set in the Dockerfile.
if [ "$PWD" = "/" ]; then
    echo "no working directory"
    exit 1
fi

"""
UVX = """\
uvx \\
  -p 3.13 \\
  -w pytest==8.4.1 \\
  -w pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA

if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
TEST_SH = HEAD + UVX

FILES: dict[str, dict[str, str]] = {
    "find-codes": {  # only a working directory; the answer is one file
        "instruction.md": "Write to /app/codes.txt a regular expression that finds part codes: two capitals, a dash, four digits.",
        "environment/Dockerfile": """
            FROM python:3.13-slim-bookworm
            WORKDIR /app
            """,
        "solution/solve.sh": """
            #!/bin/bash
            cat > /app/codes.txt << 'EOF'
            \\b[A-Z]{2}-\\d{4}\\b
            EOF
            """,
        "tests/test.sh": TEST_SH,
        "tests/test_outputs.py": """
            import re
            from pathlib import Path


            def test_codes() -> None:
                pattern = Path("/app/codes.txt").read_text().strip()
                assert re.findall(pattern, "AB-1234 aB-1234 XAB-12345 CD-0000, EF-99") == ["AB-1234", "CD-0000"]
            """,
    },
    "torn-table": {  # apt in RUN, a file copied into the working directory, uv alone makes the environment
        "instruction.md": "/app/torn.csv lost its tail. Put every whole row, as JSON objects, into /app/rows.json.",
        "environment/Dockerfile": """
            FROM python:3.13-slim-bookworm

            RUN apt-get update && apt-get install -y --no-install-recommends \\
                sqlite3 \\
                git \\
                && rm -rf /var/lib/apt/lists/*

            WORKDIR /app
            COPY torn.csv ./
            RUN sqlite3 /app/known.db "create table t(a); insert into t values (7);"
            """,
        "environment/torn.csv": "name,count\npear,3\nplum,5\nfig,",
        "solution/solve.sh": """
            #!/bin/bash
            set -e
            python3 - << 'EOF'
            import csv, json
            rows = [r for r in csv.DictReader(open("/app/torn.csv")) if r["count"]]
            json.dump([{"name": r["name"], "count": int(r["count"])} for r in rows], open("/app/rows.json", "w"))
            EOF
            """,
        "tests/test.sh": HEAD
        + "uv init\nuv add pytest==8.4.1 pytest-json-ctrf==0.3.5\n"
        + UVX.replace("uvx \\\n  -p 3.13 \\\n  -w pytest==8.4.1 \\\n  -w pytest-json-ctrf==0.3.5 \\\n  ", "uv run "),
        "tests/test_outputs.py": """
            import json
            import sqlite3
            from pathlib import Path


            def test_rows() -> None:
                rows = json.loads(Path("/app/rows.json").read_text())
                assert rows == [{"name": "pear", "count": 3}, {"name": "plum", "count": 5}]


            def test_what_the_image_made() -> None:
                assert sqlite3.connect("/app/known.db").execute("select a from t").fetchall() == [(7,)]
            """,
    },
    "lost-note": {  # the image runs a copied script as root and removes it; git history
        "instruction.md": "A note was removed from the repository /app/repo. Find its text in the history; write it to /app/note.txt.",
        "environment/Dockerfile": """
            FROM ubuntu:24.04

            ENV DEBIAN_FRONTEND=noninteractive
            RUN apt-get update && \\
                apt-get install -y git bash && \\
                rm -rf /var/lib/apt/lists/*

            WORKDIR /app
            COPY make_repo.sh /tmp/make_repo.sh
            RUN chmod +x /tmp/make_repo.sh && /tmp/make_repo.sh && rm /tmp/make_repo.sh
            """,
        "environment/make_repo.sh": """
            #!/bin/bash
            set -e
            mkdir -p /app/repo && cd /app/repo
            git init -q -b main .
            git config user.email maker@example.org && git config user.name Maker
            echo "the kettle is under the stairs" > note.txt && git add . && git commit -qm "note"
            git rm -q note.txt && git commit -qm "no note"
            """,
        "solution/solve.sh": """
            #!/bin/bash
            cd /app/repo
            git show "$(git log --format=%H -n 1 --diff-filter=A -- note.txt)":note.txt > /app/note.txt
            """,
        "tests/test.sh": TEST_SH,
        "tests/test_outputs.py": """
            import subprocess
            from pathlib import Path


            def test_note() -> None:
                assert Path("/app/note.txt").read_text().strip() == "the kettle is under the stairs"


            def test_history_is_whole() -> None:
                git = ["git", "-C", "/app/repo", "-c", "safe.directory=*", "log", "--oneline"]
                log = subprocess.run(git, capture_output=True, text=True)
                assert len(log.stdout.splitlines()) == 2
            """,
    },
    "tally-logs": {  # a generator copied into a folder, run while building, removed
        "instruction.md": "Count ERROR and WARN lines per day in /app/logs; write /app/tally.csv with the header day,level,count.",
        "environment/Dockerfile": """
            FROM python:3.13-slim-bookworm
            WORKDIR /app
            COPY tools/ /app/tools/
            RUN python /app/tools/make_logs.py && \\
                rm -rf /app/tools
            """,
        "environment/tools/make_logs.py": """
            from pathlib import Path

            folder = Path("/app/logs")
            folder.mkdir()
            for day in (1, 2, 3):
                lines = ["ERROR x"] * day + ["INFO ERROR-free"] * 4 + ["WARN y"] * (3 - day)
                (folder / f"2025-03-0{day}.log").write_text("\\n".join(lines) + "\\n")
            """,
        "solution/solve.sh": """
            #!/bin/bash
            cd /app
            echo day,level,count > tally.csv
            for file in logs/*.log; do
                for level in ERROR WARN; do
                    echo "$(basename "$file" .log),$level,$(grep -c "^$level " "$file")" >> tally.csv
                done
            done
            """,
        "tests/test.sh": TEST_SH,
        "tests/test_outputs.py": """
            from pathlib import Path


            def test_tally() -> None:
                lines = Path("/app/tally.csv").read_text().split()
                want = [f"2025-03-0{d},{level},{n}" for d in (1, 2, 3) for level, n in (("ERROR", d), ("WARN", 3 - d))]
                assert lines == ["day,level,count", *want]
            """,
    },
    "two-tongues": {  # a compiler from apt; the test runs what was written, with the image's own python3 and gcc
        "instruction.md": "Write /app/both/main.py.c: `python3 main.py.c 5` and the C program made of it both print 25.",
        "environment/Dockerfile": """
            FROM ubuntu:24.04
            RUN apt-get update
            RUN apt-get install -y gcc libc6-dev python3
            WORKDIR /app
            RUN mkdir -p both
            """,
        "solution/solve.sh": """
            #!/bin/bash
            cat > /app/both/main.py.c << 'EOF'
            #if 0
            import sys; print(int(sys.argv[1]) ** 2)
            #endif
            #if 0
            '''
            #endif
            #include <stdio.h>
            #include <stdlib.h>
            int main(int argc, char **argv) { int n = atoi(argv[1]); printf("%d\\n", n * n); return 0; }
            #if 0
            '''
            #endif
            EOF
            """,
        "tests/test.sh": TEST_SH,
        "tests/test_outputs.py": """
            import subprocess


            def test_both() -> None:
                subprocess.run(["gcc", "-x", "c", "/app/both/main.py.c", "-o", "/tmp/prog"], check=True)
                for argv in (["python3", "/app/both/main.py.c"], ["/tmp/prog"]):
                    for n in (5, 12):
                        said = subprocess.run([*argv, str(n)], capture_output=True, text=True, check=True)
                        assert said.stdout == f"{n * n}\\n"
            """,
    },
    "number-service": {  # the agent installs from the index and leaves a server running; the test talks to it
        "instruction.md": "Install six 1.17.0. Serve on port 5328: GET /NAME answers with the number in /app/numbers.json.",
        "environment/Dockerfile": """
            FROM python:3.13-slim-bookworm
            WORKDIR /app
            """,
        "solution/solve.sh": """
            #!/bin/bash
            pip install six==1.17.0
            cat > /app/server.py << 'EOF'
            import json, six
            from six.moves import BaseHTTPServer

            class Handler(BaseHTTPServer.BaseHTTPRequestHandler):
                def do_GET(self):
                    numbers = json.load(open("/app/numbers.json"))
                    body = str(numbers.get(self.path[1:], 0)).encode()
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            BaseHTTPServer.HTTPServer(("0.0.0.0", 5328), Handler).serve_forever()
            EOF
            echo '{"seven": 7}' > /app/numbers.json
            nohup python /app/server.py > /tmp/server.log 2>&1 &
            sleep 2
            """,
        "tests/test.sh": TEST_SH,
        "tests/test_outputs.py": """
            import socket
            import subprocess
            import time
            import urllib.request


            def test_the_package_is_installed() -> None:
                subprocess.run(["/usr/local/bin/python", "-c", "import six; assert six.__version__ == '1.17.0'"], check=True)


            def test_a_server_listens() -> None:
                for _ in range(50):
                    with socket.socket() as probe:
                        if probe.connect_ex(("localhost", 5328)) == 0:
                            return
                    time.sleep(0.1)
                raise AssertionError("nothing listens")


            def test_numbers() -> None:
                for name, number in (("seven", b"7"), ("none", b"0")):
                    with urllib.request.urlopen(f"http://localhost:5328/{name}", timeout=10) as answer:
                        assert answer.read() == number
            """,
    },
    "stop-jobs": {  # the test script first copies a helper to where the code under test lies; time matters
        "instruction.md": "/app/jobs.py: `async def run_all(jobs, at_once)`; a cancelled run lets every started job clean up.",
        "environment/Dockerfile": """
            FROM python:3.13-slim-bookworm
            WORKDIR /app
            """,
        "solution/solve.sh": """
            #!/bin/bash
            cat > /app/jobs.py << 'EOF'
            import asyncio

            async def run_all(jobs, at_once):
                slots = asyncio.Semaphore(at_once)
                async def one(job):
                    async with slots:
                        await job()
                tasks = [asyncio.create_task(one(job)) for job in jobs]
                try:
                    await asyncio.gather(*tasks)
                except asyncio.CancelledError:  # all were told; those that had begun clean up
                    await asyncio.gather(*tasks, return_exceptions=True)
                    raise
            EOF
            """,
        "tests/test.sh": TEST_SH.replace("source $HOME", "cp /tests/drive.py /app/drive.py\nsource $HOME"),
        "tests/drive.py": """
            import asyncio
            import sys
            from jobs import run_all

            async def job():
                print("begun", flush=True)
                try:
                    await asyncio.sleep(2)
                finally:
                    await asyncio.sleep(0.1)
                    print("cleaned", flush=True)

            asyncio.run(run_all([job] * int(sys.argv[1]), int(sys.argv[2])))
            """,
        "tests/test_outputs.py": """
            import signal
            import subprocess
            import sys
            import time

            import pytest


            @pytest.mark.parametrize(("jobs", "at_once"), [(2, 3), (3, 2)])
            def test_interrupted(jobs: int, at_once: int) -> None:
                process = subprocess.Popen([sys.executable, "/app/drive.py", str(jobs), str(at_once)], stdout=subprocess.PIPE, text=True)
                time.sleep(1.5)
                process.send_signal(signal.SIGINT)
                out, _ = process.communicate(timeout=20)
                assert out.count("begun") == min(jobs, at_once)
                assert out.count("cleaned") == min(jobs, at_once)


            def test_to_the_end() -> None:
                process = subprocess.run([sys.executable, "/app/drive.py", "2", "2"], capture_output=True, text=True, timeout=20)
                assert process.stdout.count("cleaned") == 2
            """,
    },
    "push-to-page": {  # several services and a host name; the grader is bash alone
        "instruction.md": "A push to /git/site.git must show at http://pages:8080/hello.html; `pages` is this machine.",
        "environment/Dockerfile": """
            FROM ubuntu:24.04
            RUN apt-get update && apt-get install -y git curl python3 \\
                && apt-get clean
            # No working directory but one made here.
            WORKDIR /root/work
            """,
        "solution/solve.sh": """
            #!/bin/bash
            set -e
            echo "127.0.0.1 pages" >> /etc/hosts
            mkdir -p /git /var/www/site
            git init -q --bare -b main /git/site.git
            cat > /git/site.git/hooks/post-receive << 'EOF'
            #!/bin/bash
            GIT_WORK_TREE=/var/www/site git checkout -f main
            EOF
            chmod +x /git/site.git/hooks/post-receive
            cd /var/www/site
            setsid python3 -m http.server 8080 --bind 0.0.0.0 > /var/log/site.log 2>&1 &
            sleep 1
            """,
        "tests/test.sh": """
            # Bash is asked for below a first line that is not the shebang.
            #!/bin/bash
            source /tests/push.sh
            if push_and_look "hello from $RANDOM"; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
            """,
        "tests/push.sh": """
            push_and_look() {
                local text=$1 clone
                clone=$(mktemp -d)
                git clone -q /git/site.git "$clone" 2>/dev/null || return 1
                cd "$clone" || return 1
                git config user.email tester@example.org; git config user.name Tester
                [[ -n $text ]] && echo "$text" > hello.html
                git add hello.html && git commit -qm page && git push -q origin HEAD:main || return 1
                [[ $(curl -sS --max-time 10 http://pages:8080/hello.html) == "$text" ]]
            }
            """,
    },
}


def write(folder: Path, *, offline: bool = False) -> Path:
    """Lay them out in `folder`. `offline`: without the network while agent and verifier run; building still has it."""
    for name, files in FILES.items():
        toml = TASK + ("allow_internet = false\n" if offline else "")
        for place, text in ({"task.toml": toml} | files).items():
            path = folder / name / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text).lstrip("\n"))
    return folder
