#!/bin/bash
# Part credit: something was made < the right name < not empty < the right words < exactly the right line.
root=${GYRE_ROOT:-}
score=0
[ -n "$(find . -mindepth 1 -print -quit)" ] && score=0.2
if [ -f greeting.txt ]; then
    score=0.5
    [ -s greeting.txt ] && score=0.6
    grep -qi 'hello' greeting.txt && score=0.8
    [ "$(head -c 64 greeting.txt)" = 'hello world' ] && score=1
fi
echo "{\"reward\": $score}" > "$root/logs/verifier/reward.json"
