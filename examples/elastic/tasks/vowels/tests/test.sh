#!/bin/bash
# A four hundredth for each vowel, 1 at most.
root=${GYRE_ROOT:-}
vowels=0
[ -f words.txt ] && vowels=$(tr -cd 'aeiou' < words.txt | wc -c)
[ "$vowels" -gt 400 ] && vowels=400
echo "{\"reward\": $(printf '0.%03d' $((vowels * 5 / 2)) | sed 's/^0\.1000$/1/')}" > "$root/logs/verifier/reward.json"
