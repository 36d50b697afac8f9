#!/bin/bash
# Part credit, so that weak policies differ: something was made < nearly the right name < the right name.
root=${GYRE_ROOT:-}
score=0
[ -n "$(find . -mindepth 1 -print -quit)" ] && score=0.3
[ -n "$(find . -iname '*hello*' -print -quit)" ] && score=0.6
[ -f hello.txt ] && score=1
echo "{\"reward\": $score}" > "$root/logs/verifier/reward.json"
