#!/bin/bash
# Part credit: something was made < the right name < a number in it < the right number, and notes.txt is untouched.
root=${GYRE_ROOT:-}
score=0
[ -n "$(find . -mindepth 1 ! -name notes.txt -print -quit)" ] && score=0.2
if [ -f count.txt ]; then
    score=0.5
    grep -q '[0-9]' count.txt && score=0.7
    grep -qw '7' count.txt && score=0.9
    [ "$(tr -d '[:space:]' < count.txt | head -c 8)" = 7 ] && score=1
fi
cmp -s notes.txt "$root/tests/notes.txt" || score=0
echo "{\"reward\": $score}" > "$root/logs/verifier/reward.json"
