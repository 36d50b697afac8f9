#!/bin/bash
# Part credit, so that weak policies differ: something was made < a folder was made < the right folder.
root=${GYRE_ROOT:-}
score=0
[ -n "$(find . -mindepth 1 -print -quit)" ] && score=0.3
[ -n "$(find . -mindepth 1 -type d -print -quit)" ] && score=0.6
[ -d data ] && score=1
echo "{\"reward\": $score}" > "$root/logs/verifier/reward.json"
