"""The smallest agent: one JSON line in on stdin, one JSON line out on stdout, nothing else on stdout."""

import json
import sys

intent = json.loads(sys.stdin.readline())
sys.stdout.write(json.dumps({"text": f"Hello! You said: {intent['text']}", "sources": []}) + "\n")
