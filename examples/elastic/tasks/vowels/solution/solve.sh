#!/bin/bash
echo "aeiou aeiou aeiou aeiou aeiou aeiou aeiou aeiou" > words.txt
